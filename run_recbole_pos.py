"""``python run_recbole_pos.py ...`` is ``recbole-pos run ...`` without installing the package."""

import sys

from recbole_pos.cli import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    is_command = bool(arguments) and arguments[0] in ("run", "models", "plot", "-h", "--help")
    sys.exit(main(arguments if is_command else ["run", *arguments]))
