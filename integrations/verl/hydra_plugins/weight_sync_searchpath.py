"""Makes +weight_sync=NAME and +recipes=NAME known to Hydra in verl's entry points. Hydra finds this file by itself.

hydra_plugins is a namespace package: it has no __init__.py, or it would hide every other plug-in.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class WeightSyncSearchPath(SearchPathPlugin):
    """Appends our groups behind the program's own, so that none of its files is hidden.

    Only where verl is imported: other Hydra programs of this environment keep their search path.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if "verl" not in sys.modules:
            return
        from weight_sync.config import register_host_schemas

        register_host_schemas()
        search_path.append("weight_sync", "pkg://weight_sync_conf.verl")
        search_path.append("weight_sync", "pkg://weight_sync_conf")
