// JSON as config.json and the header of safetensors hold it: objects, arrays, strings, numbers, true, false, null.
// Left out: writing, and \u escapes beyond ASCII (names of tensors and settings have none).
#pragma once
#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// A whole number of at least `least`, from a word of the command line.
inline int64_t whole_number(const std::string& word, const std::string& what, int64_t least) {
  char* end = nullptr;
  const int64_t value = std::strtoll(word.c_str(), &end, 10);
  if (word.empty() || *end || value < least)
    throw std::runtime_error(what + " is '" + word + "'; required is a whole number of at least " + std::to_string(least));
  return value;
}

struct Json {
  enum Kind { Null, Bool, Number, String, Array, Object } kind = Null;
  double number = 0;  // of Bool: 0 or 1
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  bool has(const std::string& key) const { return fields.count(key) && fields.at(key).kind != Null; }
  const Json& at(const std::string& key) const {
    if (!fields.count(key)) throw std::runtime_error("the json has no " + key);
    return fields.at(key);
  }
  double get(const std::string& key, double otherwise) const { return has(key) ? at(key).number : otherwise; }
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : s(text) {}
  Json read() {
    Json value = any();
    space();
    if (i != s.size()) fail("the end");
    return value;
  }

 private:
  const std::string& s;
  size_t i = 0;

  [[noreturn]] void fail(const std::string& what) {
    throw std::runtime_error("byte " + std::to_string(i) + " of the json: required is " + what);
  }
  void space() {
    while (i < s.size() && (s[i] == ' ' || s[i] == '\n' || s[i] == '\t' || s[i] == '\r')) ++i;
  }
  bool take(char c) {
    space();
    if (i >= s.size() || s[i] != c) return false;
    ++i;
    return true;
  }
  bool word(const char* w) {
    const std::string expected(w);
    if (s.compare(i, expected.size(), expected)) return false;
    i += expected.size();
    return true;
  }

  Json any() {
    Json value;
    space();
    if (take('{')) {
      value.kind = Json::Object;
      if (take('}')) return value;
      do {
        space();
        const std::string key = string();
        if (!take(':')) fail("a colon");
        value.fields[key] = any();
      } while (take(','));
      if (!take('}')) fail("}");
    } else if (take('[')) {
      value.kind = Json::Array;
      if (take(']')) return value;
      do value.items.push_back(any());
      while (take(','));
      if (!take(']')) fail("]");
    } else if (i < s.size() && s[i] == '"') {
      value.kind = Json::String;
      value.text = string();
    } else if (word("true")) {
      value.kind = Json::Bool;
      value.number = 1;
    } else if (word("false")) {
      value.kind = Json::Bool;
    } else if (!word("null")) {
      char* end = nullptr;
      value.kind = Json::Number;
      value.number = std::strtod(s.c_str() + i, &end);
      if (end == s.c_str() + i) fail("a value");
      i = end - s.c_str();
    }
    return value;
  }

  std::string string() {
    if (!take('"')) fail("a string");
    std::string out;
    for (; i < s.size() && s[i] != '"'; ++i) {
      if (s[i] != '\\') {
        out += s[i];
        continue;
      }
      if (++i >= s.size()) break;
      const char c = s[i];
      if (c == 'u') {
        if (i + 4 >= s.size()) fail("four hex digits");
        out += static_cast<char>(std::strtol(s.substr(i + 1, 4).c_str(), nullptr, 16));
        i += 4;
      } else {
        out += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
      }
    }
    if (i >= s.size()) fail("the end of a string");
    ++i;
    return out;
  }
};
