"""``python run_recbole_pos.py ...`` is ``recbole-pos ...`` without installing the package."""

import sys

from recbole_pos.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
