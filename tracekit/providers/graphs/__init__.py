"""Launches that are captured once and replayed: on a device through torch, on a CPU through a stand-in."""
