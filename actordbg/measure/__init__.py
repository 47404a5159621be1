"""What running processes cost, and whether two trainings agree.

In: processes to watch, logs of trainings. Out: samples of memory and who grows (`memory`), and values compared step by step
(`compare-logs`), as answers and documents. Reads the store and processes; writes only samples. Begin with `watching.py` and
`align_logs.py`; each `*_document.py` only lays out.
"""
