"""Private torch APIs that fxgraph needs, one small module per API.

``tests/test_torch_compat.py`` says plainly when a torch version changes one of them.
"""
