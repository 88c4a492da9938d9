"""Measurements of the losses over ranks: efficiency of processes on this machine, and a cost model for more ranks."""
