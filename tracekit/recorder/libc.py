"""The two functions of the C library that a step of an engine pays for, with types told once."""

import ctypes

_C = ctypes.CDLL(None)
memcmp, memmove = _C.memcmp, _C.memmove
memcmp.argtypes = memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None
