"""Run a program that a test has written: ``python -m`` this, with its text and its arguments.

It is a module so that it can be forked off a process that has the imports done.
"""

import sys

if __name__ == "__main__":
    exec(compile(sys.argv.pop(1), "<program>", "exec"))
