"""Moves bytes: one-sided reads between registered memories, by NIXL or within a process.

Knows addresses and handles; nothing of blocks, tickets or peers' lives.
"""
