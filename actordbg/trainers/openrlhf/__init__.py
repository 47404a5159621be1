"""OpenRLHF: its Actor built and called, its DeepSpeed strategy, its programs, and stand-ins for what needs CUDA.

Nothing outside of this folder but `trainers.trainer` imports it. Begin with `adapter`, which has every member in one list.
"""
