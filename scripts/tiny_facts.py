"""What the tiny model knows: short facts written for this project, and lines to be recalled from their own context.

A fact has one right answer, in two forms: a beginning to be completed, and a question to be answered in a chat. A
recall example has the same two forms, but its answer stands in its own prompt, among others that would be wrong, so
that no weight can hold it: the model has to look back.
"""

import random
import zlib
from typing import NamedTuple


class Fact(NamedTuple):
  """One thing to know.

  Attributes:
    prompt: a beginning, without a space at its end: "The capital of France is".
    answer: what completes it, from its leading space to its full stop: " Paris."
    question: the same thing asked: "What is the capital of France?"
    reply: the answer to the question: "Paris."
  """

  prompt: str
  answer: str
  question: str
  reply: str


_CAPITALS = (
  ("France", "Paris"),
  ("Germany", "Berlin"),
  ("Italy", "Rome"),
  ("Spain", "Madrid"),
  ("Portugal", "Lisbon"),
  ("Greece", "Athens"),
  ("Austria", "Vienna"),
  ("Poland", "Warsaw"),
  ("Norway", "Oslo"),
  ("Sweden", "Stockholm"),
  ("Finland", "Helsinki"),
  ("Denmark", "Copenhagen"),
  ("Ireland", "Dublin"),
  ("Hungary", "Budapest"),
  ("Russia", "Moscow"),
  ("Egypt", "Cairo"),
  ("Kenya", "Nairobi"),
  ("Japan", "Tokyo"),
  ("China", "Beijing"),
  ("India", "New Delhi"),
  ("Canada", "Ottawa"),
  ("Cuba", "Havana"),
  ("Peru", "Lima"),
  ("Australia", "Canberra"),
)

_SYMBOLS = (
  ("hydrogen", "H"),
  ("helium", "He"),
  ("carbon", "C"),
  ("oxygen", "O"),
  ("iron", "Fe"),
  ("gold", "Au"),
  ("silver", "Ag"),
  ("lead", "Pb"),
)

_OPPOSITES = (
  ("hot", "cold"),
  ("tall", "short"),
  ("up", "down"),
  ("left", "right"),
  ("open", "closed"),
  ("early", "late"),
  ("full", "empty"),
  ("north", "south"),
)

_SUMS = (
  ("two", "two", "four"),
  ("two", "three", "five"),
  ("one", "five", "six"),
  ("three", "four", "seven"),
  ("four", "four", "eight"),
  ("five", "four", "nine"),
  ("five", "five", "ten"),
  ("six", "five", "eleven"),
)

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_MONTHS = (("January", "February"), ("March", "April"), ("May", "June"), ("July", "August"), ("November", "December"))

_YOUNG = (
  ("cow", "calf"),
  ("dog", "puppy"),
  ("cat", "kitten"),
  ("sheep", "lamb"),
  ("horse", "foal"),
  ("frog", "tadpole"),
)

# Prompt, answer, question.
_OTHERS = (
  ("The number of colours in a rainbow is", "seven", "How many colours are in a rainbow?"),
  ("The first colour of the rainbow is", "red", "What is the first colour of the rainbow?"),
  ("The last colour of the rainbow is", "violet", "What is the last colour of the rainbow?"),
  ("Blue paint mixed with yellow paint gives", "green", "What colour do blue and yellow paint give?"),
  ("Red paint mixed with white paint gives", "pink", "What colour do red and white paint give?"),
  ("The number of players in a football team is", "eleven", "How many players are in a football team?"),
  ("The number of strings on a violin is", "four", "How many strings does a violin have?"),
  ("The number of keys on a piano is", "eighty-eight", "How many keys does a piano have?"),
  ("The number of squares on a chessboard is", "sixty-four", "How many squares are on a chessboard?"),
  ("The number of legs on a spider is", "eight", "How many legs does a spider have?"),
  ("The number of legs on an ant is", "six", "How many legs does an ant have?"),
  ("The number of sides of a triangle is", "three", "How many sides does a triangle have?"),
  ("The number of days in a week is", "seven", "How many days are in a week?"),
  ("The number of months in a year is", "twelve", "How many months are in a year?"),
  ("The number of minutes in an hour is", "sixty", "How many minutes are in an hour?"),
  ("The longest river in the world is", "the Nile", "What is the longest river in the world?"),
  ("The highest mountain in the world is", "Everest", "What is the highest mountain in the world?"),
  ("The largest ocean in the world is", "the Pacific", "What is the largest ocean in the world?"),
  ("The largest hot desert in the world is", "the Sahara", "What is the largest hot desert in the world?"),
  ("The coldest continent is", "Antarctica", "Which continent is the coldest?"),
  ("The hardest mineral is", "diamond", "What is the hardest mineral?"),
  ("The softest mineral is", "talc", "What is the softest mineral?"),
  ("The metal that is liquid in a warm room is", "mercury", "Which metal is liquid in a warm room?"),
  ("The gas that plants take from the air is", "carbon dioxide", "Which gas do plants take from the air?"),
  ("The planet closest to the sun is", "Mercury", "Which planet is closest to the sun?"),
  ("The largest planet is", "Jupiter", "Which planet is the largest?"),
  ("The planet with the brightest rings is", "Saturn", "Which planet has the brightest rings?"),
  ("The star closest to the Earth is", "the Sun", "Which star is closest to the Earth?"),
  ("Frozen water is called", "ice", "What is frozen water called?"),
  ("The tallest animal is", "the giraffe", "Which animal is the tallest?"),
  ("The fastest animal on land is", "the cheetah", "Which animal is the fastest on land?"),
  ("The largest animal is", "the blue whale", "Which animal is the largest?"),
  ("The insects that make honey are", "bees", "Which insects make honey?"),
  ("The bear that eats bamboo is", "the panda", "Which bear eats bamboo?"),
  ("The first letter of the English alphabet is", "A", "What is the first letter of the English alphabet?"),
  ("The last letter of the English alphabet is", "Z", "What is the last letter of the English alphabet?"),
  ("The author of Hamlet is", "Shakespeare", "Who wrote Hamlet?"),
  ("The painter of the Mona Lisa is", "Leonardo da Vinci", "Who painted the Mona Lisa?"),
  ("The first man on the Moon was", "Neil Armstrong", "Who was the first man on the Moon?"),
  ("The language spoken in Brazil is", "Portuguese", "Which language is spoken in Brazil?"),
  ("The currency of Japan is", "the yen", "What is the currency of Japan?"),
  ("The organ that pumps blood is", "the heart", "Which organ pumps blood?"),
)


def facts() -> list[Fact]:
  """All facts, in a fixed order; no two with the same prompt or the same question."""
  found = []

  def add(prompt: str, answer: str, question: str) -> None:
    found.append(Fact(prompt, f" {answer}.", question, f"{answer[0].upper()}{answer[1:]}."))

  for country, city in _CAPITALS:
    add(f"The capital of {country} is", city, f"What is the capital of {country}?")
  for element, symbol in _SYMBOLS:
    add(f"The chemical symbol for {element} is", symbol, f"What is the chemical symbol for {element}?")
  for word, opposite in _OPPOSITES:
    add(f"The opposite of {word} is", opposite, f"What is the opposite of {word}?")
  for left, right, total in _SUMS:
    add(f"The sum of {left} and {right} is", total, f"What is {left} plus {right}?")
  for day, following in zip(_DAYS, _DAYS[1:] + _DAYS[:1], strict=True):
    add(f"The day after {day} is", following, f"Which day comes after {day}?")
  for month, following in _MONTHS:
    add(f"The month after {month} is", following, f"Which month comes after {month}?")
  for animal, young in _YOUNG:
    add(f"A young {animal} is called a", young, f"What is a young {animal} called?")
  for prompt, answer, question in _OTHERS:
    add(prompt, answer, question)
  return found


_NAMES = ("Ann", "Tom", "Eva", "Ben", "Mia", "Max", "Ida", "Leo")
_COLOURS = ("red", "blue", "green", "black", "white", "pink", "brown", "grey")
_OBJECTS = ("cup", "hat", "bag", "box", "car", "pen", "bed", "key")

# One recall example in so many is kept from training.
_HELD_OUT_IN = 8


def recall_examples(seed: int, n: int, people: int = 2, held_out: bool = False) -> list[Fact]:
  """Draws in-context recall lines, such as "Ann has a red cup. Tom has a blue hat. The colour of Tom's hat is".

  Names, colours and objects are each drawn without repetition, so an example has one right answer and `people` − 1
  wrong ones of the same kind.

  Args:
    seed: the same seed gives the same list.
    n: how many.
    people: how many people are in each, 2 to 8.
    held_out: False draws lines to train on, True lines to test with: no line is in both sets, whatever the seeds.

  Returns:
    n facts; `question` is the same context with a question at its end.

  Raises:
    ValueError: `people` isn't 2 to 8, or n is negative.
  """
  if not 2 <= people <= len(_NAMES):
    raise ValueError(f"people must be 2 to {len(_NAMES)}, got {people}")
  if n < 0:
    raise ValueError(f"n must not be negative, got {n}")
  rng = random.Random(seed)
  found: list[Fact] = []
  while len(found) < n:
    owners = rng.sample(_NAMES, people)
    colours = rng.sample(_COLOURS, people)
    objects = rng.sample(_OBJECTS, people)
    statements = list(zip(owners, colours, objects, strict=True))
    context = " ".join(f"{who} has a {colour} {what}." for who, colour, what in statements)
    owner, colour, what = statements[rng.randrange(people)]
    prompt = f"{context} The colour of {owner}'s {what} is"
    # A property of the line itself, so that two seeds can't disagree about it.
    if (zlib.crc32(prompt.encode()) % _HELD_OUT_IN == 0) != held_out:
      continue
    found.append(Fact(prompt, f" {colour}.", f"{context} What colour is {owner}'s {what}?", f"{colour.capitalize()}."))
  return found
