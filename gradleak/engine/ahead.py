"""Compiles programs before they are called, several at a time: XLA spends most of a compilation on one core.

A program that was compiled here is found compiled when it is called with arguments of the same shapes. Nothing depends
on it but time: what cannot be compiled says so when it is called.
"""

import os
from collections.abc import Callable, Hashable, Iterable
from concurrent import futures
from typing import Any

MOST = 8  # compilations at a time; each takes memory


def cores() -> int:
  """Returns how many cores this process may use: fewer than the machine has, where a scheduler or taskset says so."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


class Ahead:
  """Threads that compile: one that traces, since Python runs in one at a time, and one per core that compile."""

  def __init__(self) -> None:
    self._tracing = futures.ThreadPoolExecutor(1, 'tracing')
    self._compiling = futures.ThreadPoolExecutor(min(cores(), MOST), 'compiling')
    self._started: dict[Hashable, futures.Future] = {}

  def start(self, name: Hashable, lowered: Callable[[], Iterable[Any]]) -> None:
    """Starts to compile some programs, unless those of that name were started and not waited for.

    Args:
      name: of these programs, for `wait`.
      lowered: () -> the programs as `jax.stages.Lowered`, in the order in which they are called.
    """

    def compiling() -> list[futures.Future]:
      return [self._compiling.submit(one.compile) for one in lowered()]

    if name not in self._started and cores() > 1:
      self._started[name] = self._tracing.submit(compiling)

  def wait(self, name: Hashable) -> None:
    """Returns when the programs of a name are compiled, or cannot be; at once if none were started."""
    started = self._started.pop(name, None)  # the programs are its callers' now: they take memory
    if started is not None and started.exception() is None:
      futures.wait(started.result())

  def close(self) -> None:
    """Cancels what has not begun."""
    for pool in (self._tracing, self._compiling):
      pool.shutdown(wait=False, cancel_futures=True)


def together(lowered: Callable[[], Iterable[Any]]) -> None:
  """Compiles several programs and returns when all are compiled, or cannot be."""
  ahead = Ahead()
  try:
    ahead.start('', lowered)
    ahead.wait('')
  finally:
    ahead.close()
