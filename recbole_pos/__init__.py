"""recbole-pos: position-aware sequential recommendation for RecBole.

Importing the package applies the fixes RecBole needs today (``compat.py``) and makes RecBole find
the plugin's models by name (``plug.py``).
"""

from recbole_pos import compat

compat.apply()

from recbole_pos import plug  # noqa: E402  (RecBole can only be imported after the fixes)

plug.into_recbole()

from recbole_pos.quick_start import Result, load, run  # noqa: E402
from recbole_pos.recommendation import recommend  # noqa: E402
from recbole_pos.version import __version__  # noqa: E402
from recbole_pos.warm_start import attach  # noqa: E402

__all__ = ["Result", "__version__", "attach", "load", "recommend", "run"]
