"""The lab's conda: the subset of conda's command line that a deploy uses, on py-rattler.

It runs inside the installer that lab/conda.py builds, on a lab host; nothing else is installed
there, so it imports the standard library and py-rattler only.
"""
