// Run an exported checkpoint (`codechat export --ckpt RUN --out DIR --dtype float32`): the likeliest tokens after a prompt of token ids.
//
//   build/cpp/generate DIR 100 1,2,3 [--ids N]      100 new tokens after 1 2 3; ids from N on are never taken
//
// Prints the new ids on one line, then tokens per second. Tokens and text: `codechat.text.tokenizer`.
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <iostream>

#include "gpt.h"
#include "guarded.h"

static std::vector<int64_t> ids_of(const std::string& words) {
  std::vector<int64_t> ids;
  std::stringstream stream(words);
  for (std::string word; std::getline(stream, word, ',');) ids.push_back(whole_number(word, "an id of the prompt", 0));
  if (ids.empty()) throw std::runtime_error("an empty prompt; required are token ids such as 1,2,3");
  return ids;
}

static int run(int argc, char** argv) {
  if (argc != 4 && !(argc == 6 && std::string(argv[4]) == "--ids"))
    throw std::runtime_error("usage: generate DIR NEW_TOKENS ID,ID,... [--ids N]");
  const c10::InferenceMode guard;
  const GPT model = GPT::load(argv[1]);
  const int64_t count = whole_number(argv[2], "NEW_TOKENS", 1), limit = argc == 6 ? whole_number(argv[5], "--ids", 1) : model.cfg.vocab;
  const std::vector<int64_t> prompt = ids_of(argv[3]);
  for (int64_t id : prompt)
    if (id >= model.cfg.vocab) throw std::runtime_error("id " + std::to_string(id) + " is not in the vocabulary");
  if (limit > model.cfg.vocab) throw std::runtime_error("--ids must be from 1 to " + std::to_string(model.cfg.vocab));
  model.check_length(prompt.size() + count - 1);

  Cache cache = model.new_cache(1);
  at::Tensor next = at::tensor(prompt).unsqueeze(0);
  const auto begun = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor last = model.hidden(next, &cache).narrow(1, next.size(1) - 1, 1);
    next = model.logits(last).narrow(-1, 0, limit).argmax(-1);  // (1, 1)
    std::cout << (i ? " " : "") << next.item<int64_t>();
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
  std::cout << "\n" << count / seconds.count() << " tokens/s" << std::endl;
  return 0;
}

int main(int argc, char** argv) { return guarded(run, argc, argv); }
