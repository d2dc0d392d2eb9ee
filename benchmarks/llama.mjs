// One row in llama.cpp, for peers.py: node llama.mjs FOLDER FILE.gguf, where FOLDER has node-llama-cpp.
// Each line of input is a request; each line of output the seconds of CPU time that its tokens behind the first took.
import {createInterface} from "node:readline";
import {resolve} from "node:path";
import {pathToFileURL} from "node:url";

const [folder, modelPath] = process.argv.slice(2);
const module = resolve(folder, "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(module));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath});
for await (const line of createInterface({input: process.stdin})) {
  const {prompt, tokens, temperature, topK, seed} = JSON.parse(line);
  const context = await model.createContext({contextSize: prompt.length + tokens + 2, threads: 1});
  const sampling = {temperature, topK, topP: 1, minP: 0, seed, yieldEogToken: true};
  let began = null;
  let behind = 0;
  for await (const _ of context.getSequence().evaluate(prompt, sampling)) {
    if (began === null) began = process.cpuUsage();
    else if (++behind === tokens) break;
  }
  const {user, system} = process.cpuUsage(began);
  console.log(JSON.stringify((user + system) / 1e6));
  await context.dispose();
}
process.exit(0);
