"""Times of a process on a machine that is busy with others."""

# A script's clock, in seconds. Sleeping, waiting for a disk or for a GPU counts; standing in line for a processor, which says how many
# others there are, does not. (Linux counts that for each thread; elsewhere this is the plain time.)
CLOCK = """
import time

def clock():
    try:
        with open("/proc/thread-self/schedstat") as file:
            in_line = int(file.read().split()[1]) / 1e9
    except OSError:
        in_line = 0.0
    return time.perf_counter() - in_line
"""
