"""The bytes of the objects and the keys that name them. Pure: no I/O, no clock."""
