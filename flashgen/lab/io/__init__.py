"""Bytes between device memory and the chip: modelled by algorithm, and counted on the emulator."""
