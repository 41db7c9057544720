"""Mends Triton's interpreter, which patches triton.language while a kernel runs. For a jitted
helper that a kernel calls (tl.sum is one) it patches once more, and never takes that back.
Afterwards every real compile of the process fails, unless Triton's cache on disk has the kernel.
This file knows no kernel; conftest.py calls it before any test.
"""

from typing import Any

from triton.runtime import interpreter


def undo_patches_of_helpers() -> None:
    """From now on what a helper's call patches is restored when the call ends."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()

    interpreter.InterpretedFunction.__call__ = call
