import nanoserve_plugins.attention.paged_v2_split as plugin
from nanoserve.testing import AttentionBackendSuite


class Test(AttentionBackendSuite):
    backend = "paged_v2_split"
    plugins = (plugin,)
