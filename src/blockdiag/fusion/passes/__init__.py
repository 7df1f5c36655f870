"""Passes: rewrites of the flat program, each from one equivalent program to another."""
