"""Work that runs beside a process's main work: it must not end silently, nor stop the event loop.

`tasks.py` and `threads.py` run work that never ends, and count and log its errors. `pace.py` cuts
long work into slices. `patience.py` is a deadline that does not run while this process stands
still. `garbage.py` keeps garbage collections short. Knows nothing of the work itself. Torch-free,
and imports no other room.
"""
