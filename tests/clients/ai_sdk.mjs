// The AI SDK against a running server: node ai_sdk.mjs URL CASE DIALECT
//
// Prints one JSON object of what came out; test_ai_sdk.py says what must. Knows no expectations.

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, name, dialect] = process.argv.slice(2);
const asks = JSON.parse(process.env.ASKS);
const baseURL = `${url}/v1`;
const apiKey = asks.key;

const models = {
  chat: () =>
    createOpenAICompatible({
      name: 'pdserve', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
    })(asks.model),
  responses: () => createOpenAI({ baseURL, apiKey }).responses(asks.model),
  messages: () => createAnthropic({ baseURL, apiKey })(asks.model),
};
const greedy = { model: models[dialect](), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

const place = z.object({ city: z.string(), price: z.number().int() });
const cities = [];
const tools = {
  get_weather: tool({
    description: 'Get the weather.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return JSON.parse(asks.weather_result);
    },
  }),
};

async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const cases = {
  async text() {
    const answer = await generateText({ ...greedy, prompt: asks.sum_words });
    return { text: answer.text, reason: answer.finishReason, usage: answer.usage };
  },
  async stream() {
    const answer = streamText({ ...greedy, prompt: asks.sum_words });
    const pieces = await collected(answer.textStream);
    return { pieces, reason: await answer.finishReason, usage: await answer.usage };
  },
  async reasoning() {
    const answer = await generateText({ ...greedy, prompt: asks.think_words });
    return { text: answer.text, reasoning: answer.reasoningText };
  },
  async object() {
    const answer = await generateObject({ ...greedy, schema: place, prompt: asks.place_words });
    return { object: answer.object };
  },
  async object_of_text() {
    const output = Output.object({ schema: place });
    const answer = await generateText({ ...greedy, output, prompt: asks.place_words });
    return { object: answer.output };
  },
  async object_stream() {
    const answer = streamObject({ ...greedy, schema: place, prompt: asks.place_words });
    const states = await collected(answer.partialObjectStream);
    return { states, object: await answer.object };
  },
  async tool() {
    const answer = await generateText({
      ...greedy, tools, stopWhen: stepCountIs(3), prompt: asks.weather_words,
    });
    return { text: answer.text, cities, steps: answer.steps.length };
  },
  async tool_stream() {
    const answer = streamText({
      ...greedy, tools, stopWhen: stepCountIs(3), prompt: asks.weather_words,
    });
    const kinds = (await collected(answer.fullStream)).map((part) => part.type);
    return { text: await answer.text, cities, kinds };
  },
  async required() {
    const answer = await generateText({
      ...greedy, tools, toolChoice: { type: 'tool', toolName: 'get_weather' }, prompt: 'Hello!',
    });
    return { calls: answer.toolCalls.map((call) => [call.toolName, call.input]) };
  },
};

console.log(JSON.stringify(await cases[name]()));
