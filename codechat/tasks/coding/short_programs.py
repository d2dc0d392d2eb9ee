"""Well-known small programs, each under the ways to ask for it: what `short_requests` makes conversations of.

Only read as text, never imported. A comment above a function lists what it is called, separated by `|`. Each function passes its assertion in
the tests. None is a target of the natural requests but quicksort, which is reported as trained on.
"""

# ruff: noqa


# quicksort | quick sort | a quicksort function | the quicksort algorithm | code that sorts a list with quicksort
def quicksort(items):
    if len(items) <= 1:
        return items
    pivot = items[0]
    smaller = [x for x in items[1:] if x < pivot]
    larger = [x for x in items[1:] if x >= pivot]
    return quicksort(smaller) + [pivot] + quicksort(larger)


# insertion sort | an insertion sort | the insertion sort algorithm
def insertion_sort(items):
    result = []
    for item in items:
        i = len(result)
        while i > 0 and result[i - 1] > item:
            i -= 1
        result.insert(i, item)
    return result


# selection sort | a selection sort | the selection sort algorithm
def selection_sort(items):
    items = list(items)
    for i in range(len(items)):
        smallest = min(range(i, len(items)), key=items.__getitem__)
        items[i], items[smallest] = items[smallest], items[i]
    return items


# linear search | a linear search | a function that finds an item in a list
def linear_search(items, target):
    for i, item in enumerate(items):
        if item == target:
            return i
    return -1


# factorial | the factorial of a number | a factorial function | n factorial
def factorial(n):
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


# a prime check | a function that tests whether a number is prime | is prime | a primality test
def is_prime(n):
    if n < 2:
        return False
    for i in range(2, int(n**0.5) + 1):
        if n % i == 0:
            return False
    return True


# a palindrome check | a function that tests whether a word is a palindrome | is palindrome
def is_palindrome(text):
    return text == text[::-1]


# the sum of a list | a function that adds up a list | add all numbers of a list
def sum_list(numbers):
    total = 0
    for number in numbers:
        total += number
    return total


# the product of a list | multiply all numbers of a list
def product(numbers):
    result = 1
    for number in numbers:
        result *= number
    return result


# the maximum of a list | the biggest number of a list | find the largest number
def find_max(numbers):
    largest = numbers[0]
    for number in numbers[1:]:
        if number > largest:
            largest = number
    return largest


# the minimum of a list | the smallest number of a list | find the smallest number
def find_min(numbers):
    smallest = numbers[0]
    for number in numbers[1:]:
        if number < smallest:
            smallest = number
    return smallest


# the average of a list | the mean of some numbers | an average function
def average(numbers):
    return sum(numbers) / len(numbers)


# the median of a list | a median function
def median(numbers):
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


# count the vowels of a text | a vowel counter | the number of vowels in a string
def count_vowels(text):
    return sum(letter in "aeiou" for letter in text.lower())


# remove the vowels of a text | delete all vowels from a string
def remove_vowels(text):
    return "".join(letter for letter in text if letter.lower() not in "aeiou")


# capitalize every word | put a capital letter on each word | title case
def capitalize_words(text):
    return " ".join(word.capitalize() for word in text.split())


# celsius to fahrenheit | convert celsius to fahrenheit | a temperature converter
def celsius_to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32


# fahrenheit to celsius | convert fahrenheit to celsius
def fahrenheit_to_celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9


# a power function | raise a number to a power | x to the power of n
def power(x, n):
    result = 1
    for _ in range(n):
        result *= x
    return result


# reverse a list | a function that turns a list around
def reverse_list(items):
    return items[::-1]


# reverse the words of a sentence | put the words in the opposite order
def reverse_words(text):
    return " ".join(reversed(text.split()))


# split a list into chunks | cut a list into pieces of size n
def chunks(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


# turn two lists into a dict | a dictionary from keys and values
def to_dict(keys, values):
    return dict(zip(keys, values))


# swap keys and values of a dict | invert a dictionary
def invert_dict(given):
    return {value: key for key, value in given.items()}


# merge two dictionaries | combine two dicts
def merge_dicts(first, second):
    return {**first, **second}


# add two matrices | matrix addition
def add_matrices(a, b):
    return [[x + y for x, y in zip(row, other)] for row, other in zip(a, b)]


# multiply two matrices | matrix multiplication
def multiply_matrices(a, b):
    columns = list(zip(*b))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


# the identity matrix | an identity matrix of size n
def identity_matrix(n):
    return [[1 if i == j else 0 for j in range(n)] for i in range(n)]


# the dot product | the dot product of two vectors
def dot_product(a, b):
    return sum(x * y for x, y in zip(a, b))


# a caesar cipher | encrypt a text with a caesar cipher | shift the letters of a text
def caesar_cipher(text, shift):
    result = ""
    for letter in text:
        if letter.isalpha():
            start = ord("A") if letter.isupper() else ord("a")
            letter = chr((ord(letter) - start + shift) % 26 + start)
        result += letter
    return result


# hello world | a hello world program | print hello world
def hello():
    print("Hello, world!")


# greet someone | a greeting function | say hello to a person
def greet(name):
    return f"Hello, {name}!"


# a leap year check | is it a leap year | find out whether a year is a leap year
def is_leap_year(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


# the sum of the digits | add up the digits of a number | digit sum
def digit_sum(n):
    return sum(int(digit) for digit in str(abs(n)))


# count the digits of a number | the number of digits
def count_digits(n):
    return len(str(abs(n)))


# binary to decimal | convert a binary string to a number
def binary_to_decimal(text):
    result = 0
    for digit in text:
        result = result * 2 + int(digit)
    return result


# decimal to binary | convert a number to binary
def decimal_to_binary(n):
    if n == 0:
        return "0"
    digits = ""
    while n > 0:
        digits = str(n % 2) + digits
        n //= 2
    return digits


# an even check | is a number even | test whether n is even
def is_even(n):
    return n % 2 == 0


# the even numbers of a list | keep only even numbers | filter even numbers
def even_numbers(numbers):
    return [n for n in numbers if n % 2 == 0]


# the odd numbers of a list | keep only odd numbers | filter odd numbers
def odd_numbers(numbers):
    return [n for n in numbers if n % 2 == 1]


# the squares of a list | square every number | a list of squares
def squares(numbers):
    return [n * n for n in numbers]


# the sum of squares | add up the squares of some numbers
def sum_of_squares(numbers):
    return sum(n * n for n in numbers)


# clamp a number | keep a value between two bounds
def clamp(value, low, high):
    return max(low, min(high, value))


# the absolute value | an absolute value function
def absolute(x):
    return -x if x < 0 else x


# the divisors of a number | all divisors | list the factors of n
def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


# the prime factors | factor a number into primes
def prime_factors(n):
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


# a perfect number check | test whether a number is perfect
def is_perfect(n):
    return n > 1 and sum(d for d in range(1, n) if n % d == 0) == n


# the least common multiple | lcm | the lcm of two numbers
def lcm(a, b):
    multiple = max(a, b)
    while multiple % a or multiple % b:
        multiple += 1
    return multiple


# the sum of the first n numbers | add up 1 to n | triangle number
def triangle_number(n):
    return n * (n + 1) // 2


# a multiplication table | the times table of n
def times_table(n):
    return [n * i for i in range(1, 11)]


# the hamming distance | count the places where two strings differ
def hamming_distance(a, b):
    return sum(x != y for x, y in zip(a, b))


# the common items of two lists | the intersection of two lists
def common_items(a, b):
    return [item for item in a if item in b]


# rotate a list | move the first n items of a list to the end
def rotate(items, n):
    n %= max(1, len(items))
    return items[n:] + items[:n]


# all subsets of a list | the power set
def subsets(items):
    result = [[]]
    for item in items:
        result += [subset + [item] for subset in result]
    return result


# check that a list is sorted | is a list sorted
def is_sorted(items):
    return all(a <= b for a, b in zip(items, items[1:]))


# the index of the largest number | argmax
def argmax(numbers):
    return max(range(len(numbers)), key=numbers.__getitem__)


# count a letter in a text | how often a letter occurs
def count_letter(text, letter):
    return sum(c == letter for c in text)


# the number of words in a text | a word counter | count words
def count_words(text):
    return len(text.split())


# the distance between two points | a euclidean distance
def distance(x1, y1, x2, y2):
    return ((x1 - x2) ** 2 + (y1 - y2) ** 2) ** 0.5


# the area of a circle | compute the area of a circle
def circle_area(radius):
    return 3.141592653589793 * radius**2


# the area of a rectangle | rectangle area
def rectangle_area(width, height):
    return width * height


# compound interest | how money grows with interest
def compound_interest(amount, rate, years):
    return amount * (1 + rate) ** years


# running totals | the cumulative sum of a list
def running_totals(numbers):
    totals, total = [], 0
    for number in numbers:
        total += number
        totals.append(total)
    return totals


# the differences of neighbours | differences between neighbouring numbers
def differences(numbers):
    return [b - a for a, b in zip(numbers, numbers[1:])]


# move zeros to the end | push all zeros of a list to the end
def move_zeros(numbers):
    kept = [n for n in numbers if n != 0]
    return kept + [0] * (len(numbers) - len(kept))


# the longest common prefix | the beginning that two strings share
def common_prefix(a, b):
    prefix = ""
    for x, y in zip(a, b):
        if x != y:
            break
        prefix += x
    return prefix


# join words with commas | a comma separated string
def join_with_commas(words):
    return ", ".join(words)


# split numbers from a string | turn a string into a list of integers
def to_numbers(text):
    return [int(part) for part in text.split()]


# read the lines of a file | a function that reads a file
def read_lines(path):
    with open(path) as file:
        return file.read().splitlines()


# write text to a file | save a string to a file
def write_file(path, text):
    with open(path, "w") as file:
        file.write(text)


# sort words by length | order strings by their length
def sort_by_length(words):
    return sorted(words, key=len)


# group words by their first letter | a dict from first letters to words
def group_by_first_letter(words):
    groups = {}
    for word in words:
        groups.setdefault(word[0], []).append(word)
    return groups


# the letters that two words share | common letters
def shared_letters(a, b):
    return sorted(set(a) & set(b))


# snake case to camel case | convert a name to camel case
def to_camel_case(name):
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# a stack | a stack class with push and pop
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
