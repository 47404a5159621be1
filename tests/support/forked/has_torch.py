"""Program: says whether torch is imported when it begins, as in a fork of the template of workers."""

import sys

print("torch" in sys.modules)
