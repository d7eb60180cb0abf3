"""Parity chain: small equalities between trainer and engine, and what breaks first."""
