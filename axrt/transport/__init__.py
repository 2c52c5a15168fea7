"""How ranks reach each other: one contract (`transport.Transport`) and its two implementations,
`local` and `mpi`."""

from .transport import Parcel, Transport

__all__ = ["Parcel", "Transport"]
