// What the scripts of this folder ask for. Tools come from the test that runs them, $TOOLS: their schemas, and the
// result that each is to give.
import { z } from "zod";

export const Person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.int().min(0).max(99) });
const { schemas = [], result = "" } = JSON.parse(process.env.TOOLS ?? "{}");
export const TOOLS = schemas;
export const toolRunners = Object.fromEntries(schemas.map((tool) => [tool.function.name, () => result]));
