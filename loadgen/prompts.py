"""The prompts of the reports: everyday questions whose answers are long. Their order never changes."""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "Explain how a bicycle stays upright while it is moving.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List the steps to make bread at home and say why each one matters.",
    "What is the difference between weather and climate? Give examples.",
    "Describe the water cycle to a ten-year-old child.",
    "Write a Python function that returns the prime numbers below n, and explain it.",
    "Compare travelling by train with travelling by plane.",
    "How does a computer store a picture?",
    "Give advice to somebody who starts to learn the piano as an adult.",
    "Summarise the life of a star from its birth to its end.",
    "Why do leaves change their colour in autumn?",
    "Write a polite letter to a neighbour about loud music at night.",
    "What are the main causes of the tides, and why are there two a day?",
    "Plan a three-day visit to a city by the sea.",
    "Explain the rules of chess to a beginner.",
    "How do vaccines work?",
    "Describe a day in the life of a beekeeper.",
    "What makes a good password, and why?",
    "Tell the story of the tortoise and the hare in your own words.",
    "Explain what inflation is and how it touches a family's budget.",
    "How is glass made?",
    "Write a dialogue between a teacher and a pupil about gravity.",
    "Give five ideas for saving water in a household and explain each one.",
    "What did the invention of printing change in Europe?",
)
