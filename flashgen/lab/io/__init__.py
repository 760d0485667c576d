"""Bytes between device memory and the chip: modeled by algorithm, and counted on the emulator."""
