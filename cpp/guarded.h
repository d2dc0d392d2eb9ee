// A program's main: an error is one line and exit code 2.
#pragma once
#include <c10/util/Exception.h>

#include <exception>
#include <iostream>

inline int guarded(int (*run)(int, char**), int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 2;
}
