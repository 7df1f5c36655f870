"""Regions: finds attention in a program, or names the equation that rules it out."""
