// Train the character model on a text, supervised, as `codechat chars --objective supervised` does with its defaults and 71 symbols a window.
//
//   build/cpp/train TEXT STEPS OUT [SEED]      OUT/config.json and OUT/model.safetensors, which `generate` runs
//
// Weights, windows and learning rates are those of the Python loop for the same seed, so the losses are equal but for rounding. Prints step, loss in
// nats and, at the end, tokens per second.
//
// Left out: validation, checkpoints between steps, several devices, the other objectives.
#include <torch/optim/adamw.h>
#include <torch/nn/utils/clip_grad.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <set>

#include "gpt.h"
#include "guarded.h"

constexpr int64_t DEPTH = 4, WIDTH = 128, HEADS = 4, BLOCK = 128, HORIZON = 70, BATCH = 32, WARMUP = 20;
constexpr double LR = 3e-3, FINAL = 0.1, HELD_OUT = 0.1;

// A text as ids: its characters in the order of their code points; the end of the text, which never occurs, comes last.
struct Symbols {
  at::Tensor train;  // (N,) ids of all but the last tenth
  int64_t vocab = 0;
};

static std::u32string characters(const std::string& bytes) {
  std::u32string out;
  for (size_t i = 0; i < bytes.size();) {
    const unsigned char c = bytes[i];
    const int more = c < 0x80 ? 0 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
    if (i + more >= bytes.size() + (more == 0)) throw std::runtime_error("the text is not UTF-8");
    char32_t code = more ? c & (0x3F >> more) : c;
    for (int k = 1; k <= more; ++k) code = code << 6 | (static_cast<unsigned char>(bytes[i + k]) & 0x3F);
    out += code;
    i += more + 1;
  }
  return out;
}

static Symbols read_symbols(const std::string& path) {
  const std::u32string text = characters(read_file(path));
  const std::set<char32_t> alphabet(text.begin(), text.end());
  const auto limit = static_cast<size_t>(text.size() * (1 - HELD_OUT));
  const size_t line = limit ? text.rfind(U'\n', limit - 1) : std::u32string::npos;
  const size_t cut = line == std::u32string::npos ? 0 : line + 1;
  if (cut < HORIZON + 1) throw std::runtime_error(path + " is too short; required are " + std::to_string(HORIZON + 1) + " symbols in whole lines before its last tenth; break it into lines, or give more text");
  std::map<char32_t, int64_t> number;
  for (char32_t c : alphabet) number.emplace(c, number.size());
  std::vector<int64_t> ids(cut);
  for (size_t i = 0; i < cut; ++i) ids[i] = number[text[i]];
  return {at::tensor(ids), static_cast<int64_t>(alphabet.size()) + 1};
}

static uint32_t crc32(const std::string& bytes) {
  uint32_t crc = ~0u;
  for (unsigned char c : bytes) {
    crc ^= c;
    for (int k = 0; k < 8; ++k) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

static at::Generator seeded(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// New weights, drawn under the names that they have in Python, from (seed, name).
static Tensors new_weights(const Config& c, uint64_t seed) {
  const auto drawn = [&](const std::string& name, int64_t rows, int64_t columns, double std) {
    return at::randn({rows, columns}, seeded(seed * 1'000'003 + crc32(name))) * std;
  };
  const double std = 1 / std::sqrt(double(c.width));
  Tensors w{{"model.embed_tokens.weight", drawn("wte.weight", c.vocab, c.width, 0.02)}, {"model.norm.weight", at::ones({c.width})}};
  for (int64_t i = 0; i < c.depth; ++i) {
    const std::string ours = "blocks." + std::to_string(i) + ".", theirs = "model.layers." + std::to_string(i) + ".";
    const auto qkv = drawn(ours + "attn.qkv.weight", 3 * c.width, c.width, std).chunk(3);
    for (int k = 0; k < 3; ++k) w[theirs + "self_attn." + "qkv"[k] + "_proj.weight"] = qkv[k].clone();
    w[theirs + "self_attn.o_proj.weight"] = at::zeros({c.width, c.width});
    w[theirs + "mlp.up_proj.weight"] = drawn(ours + "mlp.up.weight", c.hidden, c.width, std);
    w[theirs + "mlp.down_proj.weight"] = at::zeros({c.width, c.hidden});
    w[theirs + "input_layernorm.weight"] = at::ones({c.width});
    w[theirs + "post_attention_layernorm.weight"] = at::ones({c.width});
  }
  return w;
}

// Linear warm-up, then half a cosine.
static double rate(int64_t step, int64_t steps) {
  if (step < WARMUP) return LR * (step + 1) / WARMUP;
  const double done = std::min(1.0, double(step - WARMUP) / std::max<int64_t>(1, steps - WARMUP));
  return LR * (FINAL + (1 - FINAL) * 0.5 * (1 + std::cos(M_PI * done)));
}

static void save(const GPT& model, const std::string& directory) {
  std::filesystem::create_directories(directory);
  write_safetensors(directory + "/model.safetensors", model.w);
  const Config& c = model.cfg;
  std::ofstream file(directory + "/config.json");
  file << "{\"architectures\": [\"ArceeForCausalLM\"], \"model_type\": \"arcee\", \"hidden_act\": \"relu2\", \"vocab_size\": " << c.vocab
       << ", \"hidden_size\": " << c.width << ", \"intermediate_size\": " << c.hidden << ", \"num_hidden_layers\": " << c.depth
       << ", \"num_attention_heads\": " << c.heads << ", \"num_key_value_heads\": " << c.kv_heads << ", \"head_dim\": " << c.head_width
       << ", \"max_position_embeddings\": " << c.block << ", \"rms_norm_eps\": " << c.eps << ", \"rope_theta\": " << c.theta
       << ", \"tie_word_embeddings\": true}\n";
  if (!file.flush()) throw std::runtime_error(directory + " cannot be written");
}

static int run(int argc, char** argv) {
  if (argc != 4 && argc != 5) throw std::runtime_error("usage: train TEXT STEPS OUT [SEED]");
  const Symbols text = read_symbols(argv[1]);
  const int64_t steps = whole_number(argv[2], "STEPS", 1);
  const uint64_t seed = argc == 5 ? whole_number(argv[4], "SEED", 0) : 0;
  Config c;
  c.vocab = (text.vocab + 63) / 64 * 64;
  c.width = WIDTH, c.depth = DEPTH, c.heads = c.kv_heads = HEADS, c.head_width = WIDTH / HEADS, c.hidden = 4 * WIDTH, c.block = BLOCK;
  GPT model(c, new_weights(c, seed));

  std::vector<at::Tensor> weights;
  for (auto& [name, tensor] : model.w) weights.push_back(tensor.set_requires_grad(true));
  torch::optim::AdamW optimizer(weights, torch::optim::AdamWOptions(LR).betas({0.9, 0.95}).weight_decay(0));
  const at::Tensor window = at::arange(HORIZON + 1);
  const auto begun = std::chrono::steady_clock::now();
  for (int64_t step = 0; step < steps; ++step) {
    // the windows of this step depend on the seed and the step alone
    const at::Tensor starts = at::randint(0, text.train.size(0) - HORIZON, {BATCH}, seeded(seed * 1'000'003 + step + 2), at::kLong);
    const at::Tensor ids = text.train.index({starts.unsqueeze(1) + window});  // (B, T + 1)
    const at::Tensor logits = model.logits(model.hidden(ids.narrow(1, 0, HORIZON)));
    const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), ids.narrow(1, 1, HORIZON).flatten());

    loss.backward();
    torch::nn::utils::clip_grad_norm_(weights, 1.0);
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(rate(step, steps));
    optimizer.step();
    optimizer.zero_grad();
    std::printf("%ld %.6f\n", static_cast<long>(step + 1), loss.item<double>());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
  save(model, argv[3]);
  std::printf("%.0f tokens/s\n", steps * BATCH * HORIZON / seconds.count());
  return 0;
}

int main(int argc, char** argv) { return guarded(run, argc, argv); }
