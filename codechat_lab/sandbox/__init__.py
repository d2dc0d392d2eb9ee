"""Run untrusted Python so that it cannot forge its verdict (`pool.Pool`).

Tests and program never share an interpreter: a program can read and change everything in its
own. A judge holds the tests and requests values from an isolated process that holds the
program:

    Pool (in the trainer)  ->  judge (runs the tests)  ->  zygote (sees neither)  ->  one process per program

Isolation: Landlock, seccomp and resource limits, also for an ordinary user and in a container;
without Landlock only programs run that are explicitly trusted (isolation="none"). Not covered:
whether a path exists, kernel bugs, side channels, weak tests, machines other than x86-64 Linux.
`codechat sandbox check` shows the isolation of a machine."""
