"""The losses over ranks: efficiency of processes on this machine, and a cost model beyond it."""
