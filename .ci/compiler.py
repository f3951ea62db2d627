"""Say what is missing to compile the lock server, in one line, and end with 1; with 0 if nothing is."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

WANTED = "is needed to compile the lock server, and"

compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if shutil.which(compiler) is None:
    sys.exit(f"A C compiler {WANTED} {compiler} is not there (Debian: apt-get install gcc)")
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit(f"Python.h {WANTED} is not there (Debian: apt-get install python3-dev)")
