"""Replay: run claims on a trace with a provider in a child process."""
