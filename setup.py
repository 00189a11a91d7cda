import re

from setuptools import find_packages, setup

OCR = ["rapidocr>=3.10,<3.11", "onnxruntime>=1.27,<2"]  # its weights come in the package: another one, other rewards
TENSORBOARD = ["tensorboard>=2.20,<3"]

setup(
    name="flow_grpo",
    version=re.search(r'__version__ = "(.+)"', open("flow_grpo/__init__.py").read())[1],
    description="Reinforcement learning and preference optimisation for flow-matching image models",
    long_description=open("README.md").read(),
    long_description_content_type="text/markdown",
    author="The flow_grpo authors",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["flow_grpo", "flow_grpo.*"]),
    package_data={"flow_grpo": ["assets/**/*"]},
    install_requires=[line for line in open("requirements.txt").read().splitlines() if line and line[0] != "#"],
    extras_require={
        "ocr": OCR,
        "hpsv2": ["open_clip_torch>=3.3,<4"],
        "tensorboard": TENSORBOARD,
        # A beta, two of whose inner functions are called, and a library that it uses.
        "flash4": ["flash-attn-4[cu13]==4.0.0b36", "quack-kernels==0.6.5"],
        "test": [
            "pytest>=9,<10",
            "hypothesis>=6,<7",
            "pytest-xdist>=3.8,<4",
            "pytest-cov>=7,<8",
            "pre-commit>=4,<5",
            "ruff==0.17.5",
            "setuptools>=77",
            *OCR,
            *TENSORBOARD,
        ],
    },
)
