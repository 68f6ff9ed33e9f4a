"""The names, words and set phrases of the embedded model's chats."""

PERSONS: tuple[str, ...] = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack", "Karen", "Leo", "Maria", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Yusuf", "Zoe", "Ali", "Bella", "Carlos", "Diana",
    "Eric", "Fatima", "George", "Hannah", "Ivan", "Julia", "Kevin", "Lena", "Marco", "Nora", "Omar", "Peter", "Rita",
    "Simon", "Tara", "Uma", "Vera", "Walter", "Yara", "Alice", "Bob", "Chen", "Elena", "Finn", "Hiro", "Ines", "Jonas",
    "Kofi", "Liam", "Mia", "Nils", "Priya", "Sofia",
)  # fmt: skip

WORDS: tuple[str, ...] = (
    "cat", "dog", "fox", "cow", "owl", "pig", "hen", "bee", "ant", "sun", "sea", "sky", "map", "key", "box", "cup",
    "hat", "bag", "bed", "car", "bus", "toy", "egg", "tea", "pie", "jam", "ice", "red", "blue", "pink", "gold", "tree",
    "leaf", "rose", "bird", "fish", "frog", "duck", "bear", "wolf", "lion", "goat", "door", "wall", "roof", "road",
    "city", "ship", "boat", "kite", "ball", "bell", "coin", "ring", "book", "page", "word", "song", "game", "rain",
    "snow", "wind", "moon", "star", "lake", "hill", "rock", "sand", "milk", "cake", "rice", "salt", "soup", "corn",
    "apple", "bread", "chair", "table", "house", "horse", "mouse", "sheep", "tiger", "zebra", "snake", "eagle",
    "plant", "grass", "river", "ocean", "beach", "storm", "cloud", "night", "light", "green", "white", "black",
    "brown", "music", "piano", "paper", "pencil", "garden", "window", "orange", "lemon", "banana", "tomato", "carrot",
    "rabbit", "kitten", "monkey", "planet", "rocket", "silver", "yellow", "summer", "winter", "spring", "school",
    "friend", "mother", "father", "sister", "brother", "doctor", "market", "bridge", "castle", "dragon", "forest",
    "hello", "world", "happy", "smile", "dream", "heart", "water", "stone", "train", "plane", "clock", "phone",
)  # fmt: skip

SYSTEMS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small and helpful model.",
    "Answer briefly.",
    "Be short and exact.",
)

ABOUT: str = "I am the small model inside jaxllm."
ABILITIES: str = (
    "I can add and subtract numbers below 100, tell facts such as capitals, spell words backwards, "
    "write JSON and tell short stories."
)

# The usual first messages of new users: the phrasings of one intent, and its answer.
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning!", "Good evening!", "Hello there"),
     "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."),
     f"{ABOUT} {ABILITIES}"),
    (("What can you do?", "How can you help me?", "Help", "What do you know?", "What can I ask you?"), ABILITIES),
    (("How are you?", "How are you today?", "How is it going?", "How do you do?"),
     "I am well, thank you! What would you like to know?"),
    (("Thank you", "Thank you!", "Thanks", "Thanks!", "Thanks a lot!"), "You are welcome!"),
    (("Bye", "Bye!", "Goodbye", "Goodbye!", "See you!", "Good night!"), "Goodbye!"),
    (("Who made you?", "How were you trained?", "Where do you come from?"),
     "I was trained on a CPU in less than an hour by a script that is part of jaxllm."),
    (("Are you a large model?", "How big are you?", "How many parameters do you have?"),
     "I am very small: I have fewer than two million parameters."),
)  # fmt: skip

# Questions outside the closed world: the model should admit that instead of inventing an answer.
UNKNOWN: tuple[str, ...] = (
    "What is the meaning of life?", "Write a poem.", "Write a poem about the sea.", "What is the weather today?",
    "Who won the game?", "Write a Python program.", "Explain quantum physics.", "What is love?", "Tell me a joke.",
    "Who is the president?", "What is machine learning?", "Translate this to French.", "What time is it?",
    "What should I eat today?", "Write an essay about history.", "Why is the sky blue?", "How do planes fly?",
    "What is JAX?", "What is a transformer?", "Explain the theory of relativity.", "How do I cook rice?",
    "Who wrote Hamlet?", "What is a black hole?", "Recommend a book.", "Sing a song.", "What is the best film?",
)  # fmt: skip
UNKNOWN_ANSWER: str = f"I do not know that, because I am very small. {ABILITIES}"
