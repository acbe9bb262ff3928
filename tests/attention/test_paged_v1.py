import nanoserve_plugins.attention.paged_v1 as plugin
from nanoserve.testing import AttentionBackendSuite


class Test(AttentionBackendSuite):
    backend = "paged_v1"
    plugins = (plugin,)
