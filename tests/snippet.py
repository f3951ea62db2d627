"""Run a script in which warnings are errors: ``python -m`` this, with its path.

It is a module so that it can be forked off a process that has the imports done.
"""

import runpy
import sys
import warnings

if __name__ == "__main__":
    warnings.simplefilter("error")
    runpy.run_path(sys.argv[1], run_name="__main__")
