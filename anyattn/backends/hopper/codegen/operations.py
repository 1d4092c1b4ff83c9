"""Table of the IR operations that ``emit`` writes as CuTe code."""

__all__ = ["WRITTEN"]

WRITTEN = frozenset(
    [
        "index", "score", "scalar", "const", "load", "cast", "where", "add", "sub", "mul", "div", "neg", "abs", "min", "max", "and", "or",
        "not", "eq", "ne", "lt", "le", "gt", "ge", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf",
        "floor", "reciprocal", "ceil", "trunc", "round", "expm1", "log1p", "sign", "floordiv", "mod", "fmod", "pow", "xor", "shl", "shr",
        "tan", "atan", "atan2", "sinh", "cosh", "erfinv", "hypot", "detach", "tensor", "native",
    ]
)  # fmt: skip
