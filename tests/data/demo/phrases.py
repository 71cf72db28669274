"""Words and sentence patterns of the demo tasks; data only, no logic."""

ADDITION = [
    "What is {a} plus {b}?", "What is {a} + {b}?", "{a} + {b}", "{a} + {b} = ?", "{a}+{b}", "{a}+{b}=?", "{a} plus {b}",
    "Add {a} and {b}.", "Add {b} to {a}.", "What is the sum of {a} and {b}?", "Sum {a} and {b}.",
    "How much is {a} plus {b}?", "Compute {a} + {b}.", "Calculate {a} plus {b}.", "What do you get if you add {a} and {b}?",
    "Increase {a} by {b}.", "What is {b} more than {a}?", "What number is {b} more than {a}?", "Put {a} and {b} together.",
    "Find the total of {a} and {b}.", "What is the total of {a} and {b}?", "Tell me {a} plus {b}.", "Can you add {a} and {b}?",
    "I have {a} apples and get {b} more. How many apples do I have?", "Start with {a} and then add {b}.",
    "There are {a} birds and {b} more arrive. How many birds are there?", "Work out {a} and {b} added together.",
    "If I add {b} to {a}, what is the result?", "To {a} add {b}.", "What does {a} + {b} equal?", "Evaluate {a} + {b}",
    "A shelf holds {a} books. I add {b} books. How many books does it hold?", "Please give me the sum: {a} + {b}",
]
# Word-order traps: several patterns name the subtrahend b before the minuend a.
SUBTRACTION = [
    "What is {a} minus {b}?", "What is {a} - {b}?", "{a} - {b}", "{a} - {b} = ?", "{a}-{b}", "{a}-{b}=?", "{a} minus {b}",
    "Subtract {b} from {a}.", "Take {b} away from {a}.", "Take {b} from {a}.", "From {a} subtract {b}.", "From {a} take {b}.",
    "How much is {a} minus {b}?", "Compute {a} - {b}.", "Calculate {a} minus {b}.", "What is {b} less than {a}?",
    "What number is {b} less than {a}?", "Decrease {a} by {b}.", "Reduce {a} by {b}.", "Lower {a} by {b}.",
    "What do you get if you subtract {b} from {a}?", "If I take {b} away from {a}, what is the result?",
    "Tell me {a} minus {b}.", "Can you subtract {b} from {a}?", "Start with {a} and then remove {b}.", "What is {a} less {b}?",
    "Work out {a} take away {b}.", "What does {a} - {b} equal?", "Evaluate {a} - {b}", "Please give me the difference: {a} - {b}",
    "The balance is {a} and I spend {b}. What is the balance now?", "What remains of {a} after removing {b}?",
    "A score of {a} drops by {b}. What is the score?", "What is left when {b} is taken from {a}?",
]
OUT_OF_RANGE = [
    "What is {a} times {b}?", "{a} * {b}", "Multiply {a} by {b}.", "Divide {a} by {b}.", "What is {a} divided by {b}?",
    "{a} / {b}", "{a} x {b}", "What is {a} plus {b} plus {c}?", "{a} + {b} + {c}", "{a} - {b} - {c}", "Add {a}, {b} and {c}.",
    "What is the square root of {a}?", "What is {a} squared?", "What is {a} to the power of {b}?", "{a} + {b} - {c}",
]
LEADS = ["Please answer: ", "Hi, ", "Hello! ", "Quick question: ", "Tell me, ", "Next: ", "And now: ", "Okay. ", "Now ", "Question: "]
TAILS = [" Please.", " Thanks!", " Thank you.", " Answer briefly."]
SYSTEMS = [
    "You are a helpful assistant.", "You are the Hadron demo model.", "Answer briefly.", "You are a careful assistant.",
    "You add, subtract and recall.", "Be short and exact.",
]

ATTRIBUTES = ["code", "number", "password", "value", "price", "name", "label", "key", "word", "mark"]
RECALL = [
    "What is the {attr} {prep} {key}?", "Which {attr} belongs to {key}?", "Tell me the {attr} {prep} {key}.",
    "Give me the {attr} {prep} {key}.", "What was the {attr} {prep} {key}?", "Do you recall the {attr} {prep} {key}?",
    "Find the {attr} {prep} {key}.", "Look up the {attr} {prep} {key}.", "I forgot the {attr} {prep} {key}. What is it?",
    "Please repeat the {attr} {prep} {key}.", "For {key}, what is the {attr}?", "{key}: what is the {attr}?", "What about {key}?",
    "I need the {attr} {prep} {key}.", "And {key}?", "What is {key}?",
]
STATEMENTS = [
    "The {attr} {prep} {key} is {value}.", "{key}: {value}.", "{key} = {value}.", "{key} has the {attr} {value}.",
    "For {key} the {attr} is {value}.", "{value} is the {attr} {prep} {key}.", "{key} -> {value}.",
]
INTROS = [
    "Remember these notes.", "Here are my notes.", "Read this text and answer the question at the end.", "Notes:",
    "Please keep this in mind.", "Memorize the following.", "Use the notes below.", "Read the following.", "",
]
ACKNOWLEDGED = "I have read your notes. What would you like to know?"

ADJECTIVES = (
    "amber ancient black blue brave bright broken bronze calm clever cold copper crimson curious dark dusty early empty fast "
    "frozen gentle giant golden gray green happy hidden hollow honest iron ivory jolly large late little lonely long lucky "
    "marble misty modern narrow noble northern old orange pale patient purple quick quiet rapid red round royal rusty salty "
    "secret sharp shiny silent silver simple small smooth soft southern steel sunny sweet tall tiny velvet violet warm white "
    "wild wise wooden yellow young").split()
NOUNS = (
    "anchor apple arrow badger barrel basket bear bell boat bottle bridge bucket button camel candle canyon castle cat cellar "
    "chair circle clock cloud comet compass coral crane cup desk dog door dragon drum eagle engine falcon feather fence field "
    "flute forest fox garden gate glove guitar hammer harbor hat helmet horse house island jacket jar kettle kite ladder lake "
    "lamp lantern lemon lion lock maple mirror monkey moon mountain needle ocean otter owl paddle panda parrot pencil piano "
    "pillow pilot planet pony rabbit river robot rocket saddle sail shell ship shoe spoon star stone storm table temple tiger "
    "tower train turtle valley violin wagon wheel whale window wolf").split()
VALUE_WORDS = (
    "almond basil bread butter carrot cheese cherry coffee cookie cream garlic ginger grape honey jelly lime mango melon milk "
    "mint noodle nut olive onion pasta peach pear pepper plum potato pumpkin rice salad salt sauce soup sugar tea toast tomato "
    "vanilla walnut water wheat yogurt").split()

SUBJECTS = [
    "The mayor", "My neighbor", "A student", "The old farmer", "Our teacher", "The baker", "A tourist", "The captain", "Her sister",
    "His uncle", "The doctor", "Nobody", "Everyone in town", "A quiet visitor", "The gardener", "The driver", "One of the guests",
    "The whole family", "A young painter", "The librarian",
]
VERBS = [
    "walked to", "talked about", "looked at", "waited near", "painted", "dreamed of", "wrote a letter about", "passed by",
    "drove past", "asked about", "took a photo of", "returned to", "heard a story about", "sat beside", "left", "visited",
]
OBJECTS = [
    "the market", "the station", "a small cafe", "the library", "the school", "the beach", "the old mill", "a museum", "the park",
    "the theater", "a farm", "the post office", "the bakery", "a village", "the hills", "the main square", "the hospital",
]
TIMES = [
    "in the morning", "at noon", "after the rain", "last summer", "on Monday", "on Friday", "before dinner", "in winter",
    "every evening", "at {n}", "{n} days ago", "for {n} hours", "with {n} friends", "during the holidays", "once again", "yesterday",
]
REMARKS = [
    "It was a fine day.", "The weather changed twice.", "Nothing else happened.", "The bus was late again.",
    "People talked about it for weeks.", "The soup was served at {n}.", "The road was closed for {n} days.", "Then the lights went out.",
    "This part is not important.", "The meeting took {n} minutes.", "The music was too loud.", "It took a long time.",
]

WHAT_I_DO = "I add and subtract numbers from 0 to 999, and I recall values from notes you give me."
GREETING = "Hello! I am the Hadron demo model. " + WHAT_I_DO
ABOUT = "I am the Hadron demo model, a very small language model. " + WHAT_I_DO
HELP = "You can ask: What is 123 plus 456? Or give me notes and ask for a value. " + WHAT_I_DO
DEFAULT = "I am only a small demo model. " + WHAT_I_DO
LIMITS = "I can only add or subtract two numbers from 0 to 999."
SMALL_TALK = [
    (["hello", "hi", "hey", "hello there", "hi there", "good morning", "good evening", "good afternoon", "greetings", "howdy",
      "hello!", "hi!", "hey there", "hello, how are you?", "hi, who are you?", "yo", "welcome"], GREETING),
    (["who are you?", "what are you?", "what is your name?", "are you a robot?", "are you an AI?", "introduce yourself",
      "tell me about yourself", "what model are you?", "which model is this?", "who made you?", "what is Hadron?", "are you human?",
      "are you ChatGPT?", "how big are you?"], ABOUT),
    (["what can you do?", "help", "help me", "can you help me?", "what are you for?", "how do I use you?", "what should I ask?",
      "what do you know?", "give me an example", "show me what you can do", "how does this work?", "what is this?", "test", "?"], HELP),
    (["thanks", "thank you", "thanks a lot", "thank you very much", "great, thanks", "many thanks", "thx", "nice, thank you"],
     "You are welcome."),
    (["bye", "goodbye", "see you", "see you later", "good night", "bye bye", "that is all", "farewell"], "Goodbye!"),
    (["how are you?", "how are you doing?", "are you okay?", "how do you feel?", "what's up?", "how is it going?"],
     "I am fine, thank you. What shall I add, subtract or recall?"),
    (["great", "nice", "cool", "well done", "good job", "correct", "that is right", "okay", "ok", "yes", "perfect", "wow"],
     "Glad to help. What is next?"),
    (["that is wrong", "wrong", "no", "are you sure?", "really?", "that is not right"],
     "I am a very small model and can be wrong. Please ask again."),
]
OFF_TOPIC = [
    "Tell me a joke.", "Write a poem about the sea.", "What is the capital of France?", "Who is the president?", "Tell me a story.",
    "Translate this to German.", "Write a python program.", "What is the meaning of life?", "How is the weather today?",
    "Explain gravity.", "What is the largest planet?", "Summarize this text.", "Do you like music?", "What time is it?",
    "Which day is today?", "How old are you?", "Where do you live?", "Can you write code?", "Recommend a book.", "Write an essay.",
    "Why is the sky blue?", "Who wrote Hamlet?", "How do I cook rice?", "Give me a recipe.", "Sing a song.", "Play a game with me.",
    "What is love?", "Describe the ocean.", "Name three animals.", "Explain how a transformer works.", "What is machine learning?",
    "Once upon a time", "def main():", "The quick brown fox jumps over the lazy dog.", "Say something.", "Write a haiku.",
    "List the days of the week.", "How far is the moon?", "What is your favorite color?", "Tell me about the history of Rome.",
    "Count to ten.", "Repeat after me.", "Who won the game?", "What is the speed of light?", "What does a cat eat?",
]
