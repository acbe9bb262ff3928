import nanoserve_plugins.attention.int8_fused as plugin
from nanoserve.testing import AttentionBackendSuite


class Test(AttentionBackendSuite):
    backend = "int8_fused"
    plugins = (plugin,)
