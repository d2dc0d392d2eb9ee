// The model of codechat/models/gpt.py in libtorch, by the names of its weights in an exported directory (Arcee, Llama, Qwen2, Qwen3).
//
// Float32. Squared ReLU, relu with a gate, or SwiGLU; grouped heads, norms and biases of queries and keys, tied or own head.
// Left out: learned positions, Llama 3.1's scaled positions, packed rows, other types of weights.
//
// Shapes: B sequences, T tokens, D width, H heads, K heads of keys, E width of a head.
#pragma once
#include <ATen/ATen.h>

#include <cmath>
#include <optional>

#include "safetensors.h"

struct Config {
  int64_t vocab = 0, width = 0, depth = 0, heads = 0, kv_heads = 0, head_width = 0, hidden = 0, block = 0;
  double eps = 1e-5, theta = 10000;
  std::string act = "relu2";
  bool tied = true;
};

inline Config read_config(const std::string& path) {
  const std::string text = read_file(path);
  const Json j = JsonReader(text).read();
  Config c;
  c.vocab = j.at("vocab_size").number;
  c.width = j.at("hidden_size").number;
  c.depth = j.at("num_hidden_layers").number;
  c.heads = j.at("num_attention_heads").number;
  c.kv_heads = j.get("num_key_value_heads", c.heads);
  c.head_width = j.get("head_dim", double(c.width / c.heads));
  c.hidden = j.at("intermediate_size").number;
  c.block = j.at("max_position_embeddings").number;
  c.eps = j.get("rms_norm_eps", 1e-6);
  c.theta = j.get("rope_theta", 10000);
  c.act = j.at("hidden_act").text;
  c.tied = j.get("tie_word_embeddings", 0) != 0;
  if (j.has("rope_scaling") || j.has("rope_parameters"))
    throw std::runtime_error(path + " has scaled positions; required is a model without; export another one");
  if (c.act != "relu2" && c.act != "relu" && c.act != "silu")
    throw std::runtime_error(path + ": hidden_act " + c.act + "; required is relu2, relu or silu");
  return c;
}

// Keys and values of the tokens so far, (B, K, block, E) for each block of the model.
struct Cache {
  std::vector<at::Tensor> keys, values;
  int64_t length = 0;
};

class GPT {
 public:
  Config cfg;
  Tensors w;

  GPT(Config config, Tensors weights) : cfg(std::move(config)), w(std::move(weights)) {
    const auto steps = at::arange(0, cfg.head_width, 2, at::kFloat) / double(cfg.head_width);
    const auto angle = at::outer(at::arange(cfg.block, at::kFloat), 1.0 / at::pow(cfg.theta, steps));
    cos_ = at::cat({angle.cos(), angle.cos()}, -1);
    sin_ = at::cat({-angle.sin(), angle.sin()}, -1);
  }

  static GPT load(const std::string& directory) {
    const Config config = read_config(directory + "/config.json");
    return GPT(config, read_safetensors(directory + "/model.safetensors"));
  }

  // (B, T) ids -> (B, T, D) after the last norm. With a cache the tokens follow those in it.
  at::Tensor hidden(const at::Tensor& ids, Cache* cache = nullptr) const {
    const int64_t T = ids.size(1), past = cache ? cache->length : 0;
    check_length(past + T);
    at::Tensor x = at::embedding(weight("model.embed_tokens.weight"), ids);
    for (int64_t layer = 0; layer < cfg.depth; ++layer) {
      const std::string at = "model.layers." + std::to_string(layer) + ".";
      x = x + attention(norm(x, at + "input_layernorm.weight"), at + "self_attn.", layer, past, cache);
      x = x + mlp(norm(x, at + "post_attention_layernorm.weight"), at + "mlp.");
    }
    if (cache) cache->length += T;
    return norm(x, "model.norm.weight");
  }

  void check_length(int64_t tokens) const {
    if (tokens > cfg.block)
      throw std::runtime_error(std::to_string(tokens) + " tokens; the model takes " + std::to_string(cfg.block) + "; ask for fewer");
  }

  at::Tensor logits(const at::Tensor& hidden) const {
    return at::linear(hidden, weight(cfg.tied ? "model.embed_tokens.weight" : "lm_head.weight"));
  }

  Cache new_cache(int64_t batch) const {
    Cache cache;
    for (int64_t layer = 0; layer < cfg.depth; ++layer) {
      cache.keys.push_back(at::empty({batch, cfg.kv_heads, cfg.block, cfg.head_width}));
      cache.values.push_back(at::empty_like(cache.keys.back()));
    }
    return cache;
  }

 private:
  at::Tensor cos_, sin_;  // (block, E)

  const at::Tensor& weight(const std::string& name) const {
    const auto found = w.find(name);
    if (found == w.end()) throw std::runtime_error("the weights have no " + name + "; use config.json and weights of one model");
    return found->second;
  }
  std::optional<at::Tensor> optional(const std::string& name) const {
    const auto found = w.find(name);
    return found == w.end() ? std::nullopt : std::make_optional(found->second);
  }

  at::Tensor norm(const at::Tensor& x, const std::string& name) const {
    return x * (x.square().mean(-1, true) + cfg.eps).rsqrt() * weight(name);
  }

  // (B, T, heads * E) -> (B, heads, T, E), normed where the model has such norms, rotated.
  at::Tensor placed(const at::Tensor& x, int64_t heads, const std::string& norm_name, int64_t past) const {
    const int64_t B = x.size(0), T = x.size(1);
    at::Tensor y = x.view({B, T, heads, cfg.head_width}).transpose(1, 2);
    if (w.count(norm_name)) y = norm(y, norm_name);
    return y * cos_.narrow(0, past, T) + y.roll(cfg.head_width / 2, -1) * sin_.narrow(0, past, T);
  }

  at::Tensor attention(const at::Tensor& x, const std::string& at, int64_t layer, int64_t past, Cache* cache) const {
    const int64_t B = x.size(0), T = x.size(1);
    const auto project = [&](const char* letter) {
      const std::string name = at + letter + "_proj.";
      return at::linear(x, weight(name + "weight"), optional(name + "bias"));
    };
    const at::Tensor q = placed(project("q"), cfg.heads, at + "q_norm.weight", past);
    at::Tensor k = placed(project("k"), cfg.kv_heads, at + "k_norm.weight", past);
    at::Tensor v = project("v").view({B, T, cfg.kv_heads, cfg.head_width}).transpose(1, 2);
    std::optional<at::Tensor> mask;
    if (cache) {
      cache->keys[layer].narrow(2, past, T).copy_(k);
      cache->values[layer].narrow(2, past, T).copy_(v);
      k = cache->keys[layer].narrow(2, 0, past + T);
      v = cache->values[layer].narrow(2, 0, past + T);
      if (past && T > 1) mask = at::ones({T, past + T}, at::kBool).tril(past);
    }
    const bool causal = !mask && T > 1, grouped = cfg.kv_heads != cfg.heads;
    const at::Tensor y = at::scaled_dot_product_attention(q, k, v, mask, 0.0, causal, std::nullopt, grouped);
    return at::linear(y.transpose(1, 2).reshape({B, T, -1}), weight(at + "o_proj.weight"));
  }

  at::Tensor mlp(const at::Tensor& x, const std::string& at) const {
    at::Tensor h = at::linear(x, weight(at + "up_proj.weight"));
    if (cfg.act == "relu2") {
      h = h.relu().square();
    } else {
      const at::Tensor gate = at::linear(x, weight(at + "gate_proj.weight"));
      h = (cfg.act == "silu" ? at::silu(gate) : gate.relu()) * h;
    }
    return at::linear(h, weight(at + "down_proj.weight"));
  }
};
