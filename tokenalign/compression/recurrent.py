"""The scalars that steer how fast a linear-attention layer forgets."""

_NAMES = ("A_log", "dt_bias")


def is_recurrent_scalar(name: str) -> bool:
    """Whether a parameter is a head's decay (`A_log`) or its step (`dt_bias`) in a gated linear-attention layer.

    The cards' students keep the teacher's: small changes of them change the states of long texts much.
    """
    return name.rpartition(".")[2] in _NAMES
