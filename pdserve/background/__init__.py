"""What runs beside a process's main work, and must neither end without a word nor stop the event
loop.

`tasks.py` and `threads.py` run what goes on for ever, and count and log what it raises; `pace.py`
cuts long work into slices; `patience.py` is a deadline that does not run while this process stands
still; `garbage.py` keeps garbage collections short. Knows nothing of the work itself. Torch-free,
and imports no other room.
"""
