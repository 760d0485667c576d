"""The conformance tests: tiny kernels, one per primitive, that a GPU and the emulator must agree on.

A kernel is a file of ``kernels/``, a case one launch of it. ``source`` makes the text, ``emulated`` and ``gpu``
run it, ``records`` keeps what the GPU answered.
"""
