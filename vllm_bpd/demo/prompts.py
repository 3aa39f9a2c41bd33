"""Prompts written for the demo and the benchmarks; none was used to train the shipped heads."""

PROMPTS: tuple[str, ...] = (
    "How do plants turn sunlight into food?",
    "Write a Python function that reverses a list without using slicing.",
    "A train travels 60 miles an hour for 3 hours, then 40 miles an hour for 2 hours. How far "
    "does it go in all?",
    "Summarize: The harbour town of Lindmoor lost its ferry in 1987, and with it most of its "
    "visitors. Shops closed one after another. In 2004 three retired teachers bought the old "
    "customs house and opened a reading room. Writers came to work there, then stayed. Today "
    "the town has eleven bookshops, a festival in May, and a ferry again, twice a day in summer.",
    "Translate to French: The library opens at nine and closes at six.",
    "Give me five tips for sleeping better.",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Write a polite email asking a landlord to repair a leaking kitchen tap.",
    "Explain the difference between a virus and a bacterium.",
    "Use the text to answer. Text: The Brightwater dam was finished in 1962 and supplies water "
    "to about 400,000 people. It was raised by six metres in 1991. Question: When was the dam "
    "raised, and by how much?",
    "List the planets of the solar system in order from the sun.",
    "What should I pack for a three-day hiking trip in the mountains?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Maria has 24 apples. She gives a third to her brother and half of what is left to a "
    "friend. How many apples does she keep?",
    "Extract the names and dates from this text: On 3 March 1998 Anna Keller met Tom Berg in "
    "Oslo. They married on 12 June 2001 and moved to Lisbon in 2005.",
    "Why is the sky blue during the day and red at sunset?",
)
