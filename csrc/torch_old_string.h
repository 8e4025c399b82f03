/* std::string as in torch's wheels before 2.7 (_GLIBCXX_USE_CXX11_ABI=0).  libstdc++ has both kinds; the functions of this one
 * are called by their mangled names, so that one build serves either kind of torch.  Floor 5. */
#pragma once

#include <cstddef>
#include <string>

class pya_torch_old_string {
  public:
    pya_torch_old_string(const char *text, size_t bytes);
    ~pya_torch_old_string();
    pya_torch_old_string(const pya_torch_old_string &) = delete;
    pya_torch_old_string &operator=(const pya_torch_old_string &) = delete;
    std::string copy() const;

  private:
    char *data; /* its only member; libstdc++ writes it */
};

/* Does the loaded torch use old strings? */
bool pya_torch_has_old_strings(void);
