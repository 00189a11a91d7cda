from setuptools import setup

setup()  # for tools that look for this file; pyproject.toml says everything
