// Weights in the safetensors format: 8 bytes length, a json header, the tensors without gaps. float32 and bfloat16; one file.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "json.h"

using Tensors = std::map<std::string, at::Tensor>;

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read; required is a file");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Every tensor as float32.
inline Tensors read_safetensors(const std::string& path) {
  const std::string bytes = read_file(path);
  uint64_t length = 0;
  if (bytes.size() < 8) throw std::runtime_error(path + " is not a safetensors file");
  std::memcpy(&length, bytes.data(), 8);
  if (length > bytes.size() - 8) throw std::runtime_error(path + " is cut off; copy it again");
  const std::string header = bytes.substr(8, length);
  const Json index = JsonReader(header).read();
  Tensors found;
  for (const auto& [name, entry] : index.fields) {
    if (name == "__metadata__") continue;
    const std::string kind = entry.at("dtype").text;
    if (kind != "F32" && kind != "BF16") throw std::runtime_error(name + " is " + kind + "; required are F32 or BF16");
    std::vector<int64_t> shape;
    for (const Json& n : entry.at("shape").items) shape.push_back(static_cast<int64_t>(n.number));
    const auto& offsets = entry.at("data_offsets").items;
    const auto begin = static_cast<uint64_t>(offsets.at(0).number), end = static_cast<uint64_t>(offsets.at(1).number);
    at::Tensor tensor = at::empty(shape, kind == "F32" ? at::kFloat : at::kBFloat16);
    if (end - begin != tensor.nbytes() || end > bytes.size() - 8 - length)
      throw std::runtime_error(path + ": " + name + " is cut off; copy the file again");
    std::memcpy(tensor.data_ptr(), bytes.data() + 8 + length + begin, tensor.nbytes());
    found[name] = tensor.to(at::kFloat);
  }
  return found;
}

inline void write_safetensors(const std::string& path, const Tensors& tensors) {
  std::string header = "{";
  uint64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    std::string shape;
    for (int64_t n : tensor.sizes()) shape += (shape.empty() ? "" : ",") + std::to_string(n);
    const uint64_t end = at + 4 * tensor.numel();
    header += (header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[" +
              std::to_string(at) + "," + std::to_string(end) + "]}";
    at = end;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8);
  file << header;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor whole = tensor.detach().to(at::kCPU, at::kFloat).contiguous();
    file.write(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
  }
  if (!file.flush()) throw std::runtime_error(path + " cannot be written; is the disk full?");
}
