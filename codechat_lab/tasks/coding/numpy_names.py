"""The names of numpy that the extended suites use, for judges, which have the standard library
only. The source of the class goes into a test, in place of `import numpy as np`."""


class np:
    class ndarray: ...

    float32 = float64 = None

    @staticmethod
    def allclose(a, b, rtol=1e-5, atol=1e-8):  # type: ignore[no-untyped-def]  # a judge has no typing.Any at hand
        if isinstance(b, (list, tuple)):
            # The pairs count too: a program's object may claim a length and give no items.
            pairs = [*zip(a, b)]
            same = len(a) == len(b) == len(pairs)
            return same and all(np.allclose(x, y, rtol, atol) for x, y in pairs)
        return a == b or abs(a - b) <= atol + rtol * abs(b)
