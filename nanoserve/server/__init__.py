"""Serving: the engine in a process of its own, and the HTTP server in front of it.

``messages`` is what the two processes say to each other, ``engine_process`` the far side. On the near side
``supervisor`` looks after the process, ``streams`` keep what comes for its readers, and ``nanoserve.async_llm`` is the
API over both. ``protocol`` are the bodies of the OpenAI API, ``answers`` makes them from an engine's outputs, ``app``
puts them on URLs, ``guard`` stands before it (keys, sizes, times, disconnects, the log), ``metrics`` is for Prometheus.
"""
